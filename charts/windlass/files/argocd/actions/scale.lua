local replicas = tonumber(actionParams["replicas"])
if replicas == nil or replicas < 0 or replicas > 1000 or replicas % 1 ~= 0 then
  error("replicas: a whole number from 0 to 1000 is expected, not " .. tostring(actionParams["replicas"]), 0)
end
obj.spec.replicas = replicas
return obj
