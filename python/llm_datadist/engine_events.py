"""What a program that never blocks asks an engine: events, links on demand, messages to peers, and who is linked.

The original does not have these methods.
"""

from __future__ import annotations

from typing import Optional

from llm_datadist import _core

__all__ = ["EngineEvents"]


class EngineEvents:
    """The base of ``LLMDataDist`` with the methods about events and peers."""

    def ensure_link(
        self,
        address: str,
        *,
        metadata: Optional[bytes] = None,
        cluster_id: Optional[int] = None,
        timeout_ms: int = 3000,
    ) -> _core.Transfer:
        """Start to link to the engine that listens at an address, unless there is a link to it.

        The call never waits. A link that exists is a success, whichever side made it and by whatever call. If both
        sides link to each other at once, one link is made, and both calls succeed. While nobody listens at the address,
        the engine tries again until ``timeout_ms`` has passed. It does not restore a link that has ended: ``poll``
        returns ``LinkDown``, and another call makes another link. ``link_clusters`` to a linked peer gives
        ``LLM_ALREADY_LINK``; ``unlink_clusters`` ends the link from either side. The original does not have this
        method.

        Args:
            address: ``"ip:port"`` or ``"[ipv6]:port"`` of the peer, with a port of 1 to 65535. Host names and zones
                (``%eth0``) are not supported.
            metadata: ``bytes`` or ``bytearray`` of at most 16 KiB that the peer gets as ``Peer.metadata``. With
                ``None``, it gets the metadata of ``set_metadata``.
            cluster_id: the cluster that must answer (uint64). With ``None``, any cluster may. With a ``cluster_id``,
                the call also succeeds if that peer links to this engine meanwhile, even if the peer does not listen.
            timeout_ms: time limit of the whole call in milliseconds (uint32, above 0).

        Returns:
            The call that was started. Its ``result`` is the ``Peer``.

        Raises:
            RuntimeError: not initialized.
            TypeError: an argument has the wrong type.
            ValueError: ``cluster_id`` is outside uint64, or ``timeout_ms`` outside uint32.
            LLMException: ``LLM_PARAM_INVALID``: ``address`` is not of that form or has port 0, ``metadata`` is too
                long, ``cluster_id`` is this cluster, ``timeout_ms`` is 0, or the engine is in KvCacheManager
                mode; ``LLM_LINK_BUSY``: ``max_transfers`` calls run or have an outcome that was not taken;
                ``LLM_OUT_OF_MEMORY``: no memory for the call; ``LLM_FAILED``: no thread could be started, or a forked
                child (contract §16). The outcome of the call may be ``LLM_TIMEOUT``; ``LLM_LINK_FAILED``: the peer
                refuses, for example because of the token, another cluster or another version;
                ``LLM_PARAM_INVALID``: the two sides differ in ``enable_remote_cache_accessible``, or the address is
                that of this engine; ``LLM_FAILED``: cancelled; ``LLM_ENGINE_FINALIZED``: ``finalize`` ended it.
        """
        return self._asynchronous("ensure_link").ensure_link(address, metadata, cluster_id, timeout_ms)

    def set_metadata(self, metadata: bytes) -> None:
        """Set what the peers of later links get as ``Peer.metadata``. The original does not have this method.

        It counts for links of every kind, whichever side makes them. Existing links keep the metadata with which they
        were made. Until the first call, it is empty. A peer gets it only when each side has admitted the other.

        Args:
            metadata: ``bytes`` or ``bytearray`` of at most 16 KiB.

        Raises:
            RuntimeError: not initialized.
            TypeError: ``metadata`` is not ``bytes`` or ``bytearray``.
            LLMException: ``LLM_PARAM_INVALID``: ``metadata`` is too long.
        """
        self._check_initialized().set_metadata(metadata)

    def notify(self, cluster_id: int, payload: bytes) -> None:
        """Send a message to the program of a linked cluster, which gets it from ``poll`` as ``Notification``.

        The call returns when the message is in the window of the link. Messages over one link arrive in order, each at
        most once. If the link breaks, ``LinkDown`` counts those that the peer has not confirmed. The window holds the
        messages that the program of the peer has not polled: at most 1,024, and at most 4 MiB. The original does not
        have this method.

        Args:
            cluster_id: a linked cluster (uint64).
            payload: ``bytes`` or ``bytearray`` of at most 64 KiB.

        Raises:
            RuntimeError: not initialized.
            TypeError: an argument has the wrong type.
            ValueError: ``cluster_id`` is outside uint64.
            LLMException: ``LLM_LINK_BUSY``: the window is full, and nothing was sent; ``LLM_NOT_YET_LINK``: there is no
                link, or it broke; ``LLM_PARAM_INVALID``: ``payload`` is too long, the cluster is this one, or the
                engine is in KvCacheManager mode.
        """
        self._by_rank("notify").notify(cluster_id, payload)

    def peers(self) -> list[_core.Peer]:
        """Return the other ends of all links that have not broken. The original does not have this method.

        Raises:
            RuntimeError: not initialized.
        """
        return self._check_initialized().peers()

    def release_grant(self, token: bytes) -> None:
        """Report to the owner of a grant that this engine is done with it, as ``grant_done=True`` in a pull does.

        A reader that reports again counts once, and a report after the end changes nothing. The original does not have
        this method.

        Args:
            token: ``Grant.token`` of a linked cluster.

        Raises:
            RuntimeError: not initialized.
            TypeError: ``token`` is not ``bytes``.
            LLMException: ``LLM_GRANT_ENDED``: the owner was restarted, or never gave the grant;
                ``LLM_PARAM_INVALID``: not a token, or a grant of this engine; ``LLM_NOT_YET_LINK``: there is no link to
                the owner, or it broke; ``LLM_TIMEOUT``: ``sync_kv_timeout`` passed.
        """
        _core.Grants(self._by_rank("release_grant")).release(token)

    def poll(
        self, max_events: int = 1024
    ) -> list[_core.Completed | _core.Notification | _core.LinkUp | _core.LinkDown | _core.GrantEnded]:
        """Return the events that nobody has taken yet, in the order in which they happened, and remove them.

        The call never waits. Any thread may call it; each event goes to one caller. News about links and grants are
        kept only after the first call of ``poll`` or ``fileno``, and at most the latest ``LinkDown`` and ``LinkUp`` of
        each peer. Messages that had arrived before a link broke are still returned. An outcome that
        ``Transfer.result``, ``Transfer.exception`` or ``await`` has taken is no event any more. The original does not
        have this method.

        Args:
            max_events: maximum number of events (uint32).

        Returns:
            Objects of the classes of ``llm_datadist.events``; empty if nothing has happened.

        Raises:
            RuntimeError: not initialized.
            TypeError: ``max_events`` is not an ``int``.
            ValueError: ``max_events`` is outside uint32.
            LLMException: ``LLM_PARAM_INVALID``: the engine is in KvCacheManager mode; ``LLM_OUT_OF_MEMORY``: no memory
                for the list, and the events stay; ``LLM_FAILED``: a forked child (contract §16).
        """
        return self._asynchronous("poll").poll(max_events)

    def fileno(self) -> int:
        """Return a file descriptor that is readable while ``poll`` has something to return.

        It is close-on-exec, belongs to the engine, and is the same until ``finalize``, which closes it. Do not read,
        write or close it. ``select`` and ``selectors`` also accept the ``LLMDataDist`` itself. The original does not
        have this method.

        Raises:
            RuntimeError: not initialized.
            LLMException: ``LLM_PARAM_INVALID``: the engine is in KvCacheManager mode; ``LLM_FAILED``: no descriptor is
                left, or a forked child (contract §16).
        """
        return self._asynchronous("fileno").fileno()

    def drain(self, timeout_ms: Optional[int] = None) -> bool:
        """Wait until no asynchronous call runs. Ctrl-C interrupts the wait. The original does not have this method.

        It takes no outcome: the events of the calls stay in the queue of ``poll``.

        Args:
            timeout_ms: time limit in milliseconds (uint32); 0 does not wait, and ``None`` waits without limit.

        Returns:
            Whether no asynchronous call runs. ``False`` if ``timeout_ms`` passed first.

        Raises:
            RuntimeError: not initialized.
            TypeError: ``timeout_ms`` is not an ``int`` or ``None``.
            ValueError: ``timeout_ms`` is outside uint32.
            LLMException: ``LLM_PARAM_INVALID``: the engine is in KvCacheManager mode; ``LLM_FAILED``: a forked child
                (contract §16).
        """
        return self._asynchronous("drain").drain(timeout_ms)

    def _asynchronous(self, call: str) -> _core.Events:
        raise NotImplementedError(call)

    def _by_rank(self, call: str) -> _core.DataDist:
        raise NotImplementedError(call)

    def _check_initialized(self) -> _core.DataDist:
        raise NotImplementedError
