"""How many decoder layers FSDP gathers and reduces together; the memory model counts the same."""

UNIT_PARAMETERS = 100_000_000


def layers_per_unit(parameters: int) -> int:
    """Number of consecutive decoder layers of a unit, given the parameters of the largest.

    FSDP's hooks take about 2 ms of Python per unit and update on a machine with H100s, as long as the GPU works on a layer of a
    0.5B model. In models of 3B and more each layer is a unit.
    """
    return max(1, UNIT_PARAMETERS // parameters)
