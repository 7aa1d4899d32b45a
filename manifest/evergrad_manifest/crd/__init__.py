"""The CustomResourceDefinition, generated from the manifest's models. Pure."""
