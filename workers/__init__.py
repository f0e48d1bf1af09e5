"""What runs beside the GPU. Never imports trainer."""
