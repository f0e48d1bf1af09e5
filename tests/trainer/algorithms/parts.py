"""Trajectories that are one row each, as several rows."""

from itertools import pairwise

import torch

from workers.batch import Batch


def in_parts(batch: Batch, seed: int) -> Batch:
    """The same trajectories, most of them as two to four rows: the tokens up to a place, of which the last are trained.

    Row numbers of parts that do not end a trajectory are others. Parts are anywhere in the batch, but the first rows of the
    trajectories are in their order. tokens serial: index of a token in the original. rows trajectory: descending; part: even.
    """
    g = torch.Generator().manual_seed(seed + 2)
    batch = batch.with_tokens(serial=torch.arange(batch.total_tokens))
    first, others = list[Batch](), list[Batch]()
    for row in range(len(batch)):
        whole = batch.select([row])
        trained = whole.tokens["response_mask"].nonzero().flatten()
        n = min(int(torch.randint(1, 5, (1,), generator=g)) if row % 3 else 3, max(len(trained), 1))
        # A part ends after any trained token, the last one where the row ends.
        inner = trained[torch.randperm(max(len(trained) - 1, 0), generator=g)[: n - 1]] + 1
        parts = []
        for number, (start, end) in enumerate(pairwise([0, *sorted(inner.tolist()), whole.total_tokens])):
            tokens = {name: column[:end].clone() for name, column in whole.tokens.items()}
            tokens["response_mask"][:start] = 0
            rows, objects = {name: column.clone() for name, column in whole.rows.items()}, dict(whole.objects)
            if end < whole.total_tokens:
                rows |= {name: rows[name] + 7.0 for name in {"reward", "score", "last_value", "baseline"} & rows.keys()}
                rows |= {name: 1 - rows[name] for name in {"finished"} & rows.keys()}
                rows |= {name: ~rows[name] for name in {"reward_failed"} & rows.keys()}
                objects |= {name: [dict.fromkeys(objects[name][0], 99.0)] for name in {"reward_extra"} & objects.keys()}
            rows |= {"trajectory": torch.tensor([1000 - 7 * row]), "part": torch.tensor([2 * number])}
            parts.append(Batch(torch.tensor([end]), tokens, rows, objects, batch.meta))
        order = torch.randperm(len(parts), generator=g).tolist()
        first.append(parts[order[0]])
        others += [parts[i] for i in order[1:]]
    return Batch.concat(first + [others[i] for i in torch.randperm(len(others), generator=g).tolist()])
