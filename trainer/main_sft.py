"""python -m trainer.main_sft: supervised fine-tuning on prompt and answer pairs."""
