-- A run that trains is Progressing, as a Job is: later sync waves wait for its end.
-- Runs without Lua's standard libraries, which Argo CD switches off for scripts of its users.
local hs = { status = "Progressing", message = "waiting for the operator" }
local meta, status, is = obj.metadata, obj.status, {}

if meta.deletionTimestamp ~= nil then
  hs.message = "being deleted"
  return hs
end
if status == nil or status.conditions == nil then
  return hs
end
-- Until then the conditions are those of an earlier version of the file.
if status.observedGeneration ~= meta.generation then
  hs.message = "waiting for the operator to see the change"
  return hs
end

for _, condition in ipairs(status.conditions) do
  is[condition.type] = condition.status == "True"
end
hs.message = status.message or ""
if is.Complete then
  hs.status = "Healthy"
elseif is.Failed or is.Stalled then
  -- Stalled is True for what a person must mend alone: a queue or a full cluster is none of it.
  hs.status = "Degraded"
elseif is.Suspended then
  hs.status = "Suspended"
elseif is.Ready and status.progress ~= nil and status.progress.summary ~= nil then
  hs.message = "step " .. status.progress.summary .. ": " .. hs.message
end
return hs
