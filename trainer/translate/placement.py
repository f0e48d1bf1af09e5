"""Which models have which GPUs."""

from collections.abc import Iterator

from trainer.translate.arguments import Arguments
from trainer.translate.entries import Entry, mapped


def placement(arguments: Arguments) -> Iterator[Entry]:
    used = [name for name, flag in arguments.source.flags.items() if flag.rule == "placement" and arguments.has(name)]
    settings = {"trainer.nnodes": arguments.count("actor_num_nodes"), "trainer.n_gpus_per_node": arguments.count("actor_num_gpus_per_node")}
    yield mapped(used, settings, "all models share the actor's GPUs")
