"""Compare rollout engines: the same prompts through each engine, and its responses through the trainer."""
