"""How the ranks meet: private groups, sockets, a call, its header, and the agreement on the headers of all ranks."""
