"""YAML and its schema. Loads neither torch nor ray."""
