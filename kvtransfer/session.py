"""The two halves of a handoff as pure state machines."""

from kvtransfer.causes import HandoffCause, HandoffFault
from kvtransfer.receive_session import ReceiveSession, ReceiveState
from kvtransfer.send_session import SendSession, SendState

__all__ = ["HandoffCause", "HandoffFault", "ReceiveSession", "ReceiveState", "SendSession", "SendState"]
