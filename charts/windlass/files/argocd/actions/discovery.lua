-- What can be done with a windlass.dev/InferenceService in Argo CD. Each action writes only fields that Git leaves out.
local autoscaling = obj.spec.autoscaling or {}
local obeys_replicas = autoscaling.mode ~= "Builtin" or autoscaling.shadow == true
local rollout = obj.spec.rollout or {}
local is_paused = rollout.paused == true
local status = obj.status or {}

local has_earlier = false
for _, revision in ipairs(status.revisions or {}) do
  has_earlier = has_earlier or revision.name ~= status.revision
end

return {
  scale = {
    disabled = not obeys_replicas,
    params = { { name = "replicas" } },
  },
  restart = { disabled = is_paused },
  pause = { disabled = is_paused },
  resume = { disabled = not is_paused },
  rollback = { disabled = not has_earlier, params = { { name = "revision" } } },
  unpin = { disabled = rollout.pinnedRevision == nil },
}
