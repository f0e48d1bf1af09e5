"""YAML configuration and its schema. Imports neither torch nor ray."""
