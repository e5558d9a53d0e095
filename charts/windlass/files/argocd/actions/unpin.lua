obj.spec.rollout = obj.spec.rollout or {}
obj.spec.rollout.pinnedRevision = nil
return obj
