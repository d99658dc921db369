"""Selection: which groups a step takes."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from itertools import islice
from typing import Protocol

from verl.trainer.buffer.groups import Group


class Selection(Protocol):
    """A policy that chooses the groups of a step."""

    async def select(self, groups: Collection[Group], count: int, version: int) -> list[Group]:
        """Wait until `count` groups can be taken, and return them in the order of training.

        Called again for the missing ones if some of them are not trained (dropped prompts, groups without signal).

        Args:
            groups: All groups that have started and were not taken, in the order of the stream. Groups that start while
                the policy waits appear at its end.
            count: The number of groups; at least as many have started.
            version: The version of the weights that the step starts from.

        Raises:
            Exception: The error of a group that the policy waits for.
        """
        ...


class InOrder:
    """Takes groups in the order of the stream, whichever finish first, so that a run does not depend on timing."""

    async def select(self, groups: Collection[Group], count: int, version: int) -> list[Group]:
        oldest = list(islice(groups, count))
        await asyncio.gather(*(group.task for group in oldest))
        return oldest
