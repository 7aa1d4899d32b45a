"""Values as people write them: numbers with units, quantities of Kubernetes."""
