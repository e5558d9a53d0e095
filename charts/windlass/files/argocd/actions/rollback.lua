-- To the revision that is named, or else to the newest that is not served now.
local named = (actionParams or {})["revision"]
local known = obj.status and obj.status.revisions or {}
for _, revision in ipairs(known) do
  local is_meant = revision.name == named
  if named == nil or named == "" then
    is_meant = revision.name ~= obj.status.revision
  end
  if is_meant then
    obj.spec.rollout = obj.spec.rollout or {}
    obj.spec.rollout.pinnedRevision = revision.name
    return obj
  end
end
error("revision: one of status.revisions is expected, not " .. tostring(named), 0)
