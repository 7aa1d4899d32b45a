-- Stop with the state saved, and release the nodes.
obj.spec.suspend = true
return obj
