-- What a person may do with a run now.
local is, suspended, actions = {}, obj.spec.suspend == true, {}
if obj.status ~= nil and obj.status.conditions ~= nil then
  for _, condition in ipairs(obj.status.conditions) do
    is[condition.type] = condition.status == "True"
  end
end

local over = is.Complete or is.Failed or false
actions["suspend"] = { ["disabled"] = over or suspended, ["iconClass"] = "fa fa-fw fa-pause" }
actions["resume"] = { ["disabled"] = over or not suspended, ["iconClass"] = "fa fa-fw fa-play" }
-- A failed run begins again with fresh budgets; a complete one never trains again.
actions["restart"] = { ["disabled"] = is.Complete or suspended, ["iconClass"] = "fa fa-fw fa-redo" }
return actions
