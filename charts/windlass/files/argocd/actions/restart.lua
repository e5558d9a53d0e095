local os = require("os")
obj.spec.rollout = obj.spec.rollout or {}
obj.spec.rollout.restartedAt = os.date("!%Y-%m-%dT%H:%M:%SZ")
return obj
