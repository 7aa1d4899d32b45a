-- All pods leave with their state saved and come again. The number of the attempt makes the text a new one for
-- each restart, and a second click before the first has had its effect the same one.
local attempt = 0
if obj.status ~= nil and obj.status.attempt ~= nil then
  attempt = obj.status.attempt
end
obj.spec.restartNonce = "argocd-" .. (attempt + 1)
return obj
