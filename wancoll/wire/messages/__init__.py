"""All typed messages: `from wancoll.wire import messages as m`. Ill-typed fields are refused, by name."""

from wancoll.wire.messages.client_messages import *
from wancoll.wire.messages.epoch_messages import *
from wancoll.wire.messages.fields import *
from wancoll.wire.messages.lane_messages import *
from wancoll.wire.messages.master_messages import *
from wancoll.wire.messages.peer_messages import *
from wancoll.wire.messages.relay_messages import *
from wancoll.wire.messages.status_messages import *
from wancoll.wire.messages.trust_messages import *
