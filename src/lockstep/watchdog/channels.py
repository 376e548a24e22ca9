"""Messages by channel: which send of one rank belongs to which receive of another.

Messages of one group, source, destination and tag are received in the order in which they were sent. Each rank counts
what it has sent, and for what it has posted receives, by channel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..flight_recorder import RawRecord, RecorderReader
from ..flight_recorder.layout import StateWords
from .call_sites import digest
from .mismatch import Finding

__all__ = [
    "TAGS_ADVICE",
    "awaited_channels",
    "channel_key",
    "describe_tags",
    "explained",
    "is_message_sent",
    "is_receive_posted",
    "is_recv",
    "message_number",
    "receive_number",
    "size_finding",
]

_WORDS = StateWords()

TAGS_ADVICE = "Give a send and its recv the same tag."


def channel_key(sent: bool, group: int, source: int, target: int, tag: int) -> int:
    """Return the key of a channel; see `flight_recorder.layout.Layout.channels`.

    Args:
        sent: whether of its sends; else of its receives.
        group: key of the group.
        source: the rank that sends; -1 for receives from any rank.
        target: the rank that receives.
        tag: of the messages.
    """
    return digest(f"{'send' if sent else 'recv'} {group} {source} {target} {tag}")


def is_recv(own: RecorderReader, raw: RawRecord) -> bool:
    """Return whether that record of the rank `own` is a receive."""
    return own.text(raw.what).startswith("recv")


def message_number(own: RecorderReader, raw: RawRecord) -> int:
    """Return the number of the receive or send `raw` of the rank `own` in its channel."""
    sent = not is_recv(own, raw)
    source, target = (own.rank, raw.peer) if sent else (raw.peer, own.rank)
    behind = sum((each.key, each.tag) == (raw.key, raw.tag) for each in _later(own, raw))
    return own.channel_messages(channel_key(sent, raw.key, source, target, raw.tag)) - behind


def receive_number(own: RecorderReader, raw: RawRecord) -> int:
    """Return the number of the receive `raw` of the rank `own` among all receives from its peer, of any tag."""
    return own.messages(raw.peer, sent=False) - len(_later(own, raw))


def awaited_channels(own: RecorderReader, raw: RawRecord) -> list[int]:
    """Return the keys of the peer's channels whose messages count for the receive or send `raw` of the rank `own`."""
    if is_recv(own, raw):
        return [channel_key(True, raw.key, raw.peer, own.rank, raw.tag)]
    return [channel_key(False, raw.key, source, raw.peer, raw.tag) for source in (own.rank, -1)]


def is_message_sent(own: RecorderReader, sender: RecorderReader, raw: RawRecord) -> bool:
    """Return whether the message of the receive `raw`, of the rank `own`, has been sent."""
    if not (own.knows_channels and sender.knows_channels):
        return sender.messages(own.rank, sent=True) >= receive_number(own, raw)
    return _messages(sender, awaited_channels(own, raw)) >= message_number(own, raw)


def is_receive_posted(own: RecorderReader, receiver: RecorderReader, raw: RawRecord) -> bool:
    """Return whether the send `raw` of the rank `own` has, or may have, a receive that was posted for it.

    A receive from any rank may have been posted for it.
    """
    if not (own.knows_channels and receiver.knows_channels):
        return True
    return _messages(receiver, awaited_channels(own, raw)) >= message_number(own, raw)


def _messages(reader: RecorderReader, channels: Sequence[int]) -> int:
    return sum(reader.channel_messages(channel) for channel in channels)


def _later(own: RecorderReader, raw: RawRecord) -> list[RawRecord]:
    """Return the messages after `raw` with the same peer in the same direction."""
    recv = is_recv(own, raw)
    later = (own.raw(number) for number in range(raw.number + 1, own.state_word(_WORDS.records) + 1))
    return [each for each in later if each is not None and each.peer == raw.peer and is_recv(own, each) == recv]


# --- What is wrong ----------------------------------------------------------------------------------------------------


def _find_other_tag(own: RecorderReader, peer: RecorderReader, raw: RawRecord) -> int | None:
    """Return the tag of a message of `peer` that would fit the send or receive `raw` of `own` but for its tag.

    Returns:
        None if there is none that has no counterpart.
    """
    sent = is_recv(own, raw)  # by the peer
    source, target = (peer.rank, own.rank) if sent else (own.rank, peer.rank)
    for each in reversed(list(peer.raws())):
        fits = each.peer == own.rank and each.key == raw.key and is_recv(peer, each) != sent and each.tag != raw.tag
        if fits:
            theirs, ours = (channel_key(side, raw.key, source, target, each.tag) for side in (sent, not sent))
            if peer.channel_messages(theirs) > own.channel_messages(ours):
                return each.tag
    return None


def describe_tags(own: RecorderReader, peer: RecorderReader, raw: RawRecord) -> str:
    """Return which message of `peer` has another tag than that of the send or receive `raw` of `own`; "" for none."""
    other = _find_other_tag(own, peer, raw) if raw.peer == peer.rank else None
    if other is None:
        return ""
    here, there = ("receives", "sends") if is_recv(own, raw) else ("sends", "receives")
    return f"The tags differ: rank {own.rank} {here} with tag {raw.tag}, rank {peer.rank} {there} with tag {other}."


def explained(finding: Finding, own: RecorderReader, peer: RecorderReader, raw: RawRecord) -> Finding:
    """Return the finding on the message `raw` of `own`, with the tags as its cause if they differ."""
    tags = describe_tags(own, peer, raw)
    return replace(finding, cause=tags, advice=TAGS_ADVICE) if tags else finding


def size_finding(ranks: tuple[int, int], sizes: tuple[int, int], tag: int, call: str) -> Finding:
    """Return the finding for a message that is larger than its receive.

    Args:
        ranks: source and destination.
        sizes: of the message and of the tensor that is to receive it, in bytes.
        tag: of the message.
        call: the one of both that came second, as text.
    """
    of_tag = f" (tag {tag})" if tag else ""
    return Finding(
        "desync",
        f"Rank {ranks[0]} sends {sizes[0]:,} bytes to rank {ranks[1]}{of_tag}, which receives into {sizes[1]:,} bytes, "
        f"in {call}.",
        (),
        "The tensors of this send and recv have other shapes or dtypes, or messages are received in another order than "
        "they were sent.",
        "Receive into a tensor of the shape and dtype that is sent, in the order of the sends; give messages that may "
        "overtake each other tags.",
    )
