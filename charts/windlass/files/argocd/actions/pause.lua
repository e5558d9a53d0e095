obj.spec.rollout = obj.spec.rollout or {}
obj.spec.rollout.paused = true
return obj
