"""The parts that every section uses: base class, fields, nesting, descriptions, containers and claims."""
