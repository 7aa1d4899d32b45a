-- Go on at the step that was saved.
obj.spec.suspend = false
return obj
