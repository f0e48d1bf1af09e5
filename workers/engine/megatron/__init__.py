"""Megatron engine: tensor, pipeline, context and sequence parallelism from megatron-core."""

import logging
import warnings

# megatron-core logs its settings, every parameter, and the features that it does not use.
logging.getLogger("megatron").setLevel(logging.WARNING)
warnings.filterwarnings("ignore", module=r"megatron\.")
warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
