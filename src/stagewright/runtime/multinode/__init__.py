"""Several machines in one run: how `--nodes` names them (nodes), the authenticated connection to machine 0's store
(tunnel), what must be the same on all (consistency), and how their supervisors start and stop together (meeting).

`process` imports this folder; everyone else only `nodes`."""
