"""The Megatron engine: tensor, pipeline, context and sequence parallelism from megatron-core."""

import logging
import warnings

# megatron tells its settings, every parameter, and what it is not going to use.
logging.getLogger("megatron").setLevel(logging.WARNING)
warnings.filterwarnings("ignore", module=r"megatron\.")
warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
