"""The file of a TrainingRun: models, rules, identity and CRD. Imports pydantic and YAML only."""
