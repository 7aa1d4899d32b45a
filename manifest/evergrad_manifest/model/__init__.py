"""The parts of every section: base class, fields, nesting, descriptions, containers and claims."""
