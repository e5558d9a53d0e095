-- Health of windlass.dev/InferenceService for Argo CD.
-- Degraded only where somebody has to change something; what is merely on its way is Progressing, and what an
-- autoscaler adds or takes away while the service is ready is nobody's concern.
local status = obj.status or {}
if status.observedGeneration ~= obj.metadata.generation then
  return { status = "Progressing", message = "the operator has not seen this generation yet" }
end

local conditions = {}
for _, condition in ipairs(status.conditions or {}) do
  conditions[condition.type] = condition
end

local function is(kind, value, reason)
  local found = conditions[kind]
  return found ~= nil and found.status == value and found.observedGeneration == obj.metadata.generation
    and (reason == nil or found.reason == reason)
end

local function report(health, condition)
  return { status = health, message = condition.reason .. ": " .. condition.message }
end

if is("Stalled", "True") then
  return report("Degraded", conditions.Stalled)
end
if is("Ready", "False", "ScaledToZero") then
  return report("Suspended", conditions.Ready)
end
if is("Progressing", "False", "Paused") then
  return report("Suspended", conditions.Progressing)
end
local mode = (obj.spec.autoscaling or {}).mode or "Manual"
-- More replicas start, or some of more than are wanted leave; neither a rollout nor a write that failed.
local is_scaling = mode ~= "Manual"
  and is("Reconciling", "True", "Converging")
  and (is("Progressing", "True", "ReplicasStarting") or is("Progressing", "True", "Complete"))
if is("Ready", "True") and (is("Reconciling", "False") or is_scaling) then
  return { status = "Healthy", message = conditions.Ready.message }
end
return report("Progressing", conditions.Ready or { reason = "Unknown", message = "no condition yet" })
