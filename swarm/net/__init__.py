"""The transport: gRPC over mutual TLS, with certificates derived from PeerIDs only."""

from __future__ import annotations

import os

# Set before grpc is imported, and only where the user has not set them: gRPC's fork handlers print warnings
# and can hang in DataLoader workers (which never use the network: swarm.runtime.fork), and its own log lines
# repeat the messages of swarm's errors.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
