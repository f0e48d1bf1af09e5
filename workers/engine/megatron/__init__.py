"""The Megatron engine: tensor, pipeline, context and sequence parallelism from megatron-core."""
