-- Health of windlass.dev/InferenceService for Argo CD.
-- Degraded only where somebody has to change something; what is merely on its way is Progressing.
local status = obj.status or {}
if status.observedGeneration ~= obj.metadata.generation then
  return { status = "Progressing", message = "the operator has not seen this generation yet" }
end

local conditions = {}
for _, condition in ipairs(status.conditions or {}) do
  conditions[condition.type] = condition
end

local function is(kind, value)
  local found = conditions[kind]
  return found ~= nil and found.status == value and found.observedGeneration == obj.metadata.generation
end

if is("Stalled", "True") then
  return { status = "Degraded", message = conditions.Stalled.reason .. ": " .. conditions.Stalled.message }
end
if conditions.Ready ~= nil and conditions.Ready.reason == "ScaledToZero" then
  return { status = "Suspended", message = conditions.Ready.message }
end
if is("Ready", "True") and is("Reconciling", "False") then
  return { status = "Healthy", message = conditions.Ready.message }
end
local why = conditions.Ready or { reason = "Unknown", message = "no condition yet" }
return { status = "Progressing", message = why.reason .. ": " .. why.message }
