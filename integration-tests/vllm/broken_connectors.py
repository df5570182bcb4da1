"""Negative controls: connectors that report success and hand over the wrong bytes.

If the tokens of a run with one of them were right, the comparison of tokens would prove nothing.
"""

from __future__ import annotations

from typing import Any

from llm_datadist.integrations.vllm.connector import LlmDatadistConnector
from llm_datadist.integrations.vllm.group_caches import GroupCaches


class _NothingPulled(GroupCaches):
    def pull_pages(self, owners: Any, pairs: Any, timeout_ms: int) -> Any:
        """Pull every page into block 0, which vLLM never reads."""
        return super().pull_pages(owners, [(pairs[0][0], 0)], timeout_ms)


class _BlocksSwapped(GroupCaches):
    def pull_pages(self, owners: Any, pairs: Any, timeout_ms: int) -> Any:
        """Exchange the last two pages.

        The others are full, and attention does not depend on the order of full pages.
        """
        *rest, (first, to_first), (second, to_second) = pairs
        return super().pull_pages(owners, [*rest, (second, to_first), (first, to_second)], timeout_ms)


class _Broken(LlmDatadistConnector):
    caches: type[GroupCaches]

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Register, and break the pulls."""
        super().register_kv_caches(kv_caches)
        for group in self._of_worker.groups:
            group.__class__ = self.caches


class NothingPulled(_Broken):
    """Reports success without pulling anything."""

    caches = _NothingPulled


class BlocksSwapped(_Broken):
    """Exchanges two blocks of each request."""

    caches = _BlocksSwapped
