"""Messages between the launcher and the ranks of a cell: a task and a result, each a JSON file in the cell's folder.

This package is all that both sides share. It imports neither torch nor Arrow, so that a rank starts fast and can
report that its memory ran out. The modules, in the order of a first reading:

- Messages: `task` tells the ranks what to run. `result` is what a row needs. `durable` writes files that survive a
  power cut.
- Ends: `exit_codes` and `failures` tell the launcher how ranks ended, and `lifetime` ends processes with their parent.
- Start: `rendezvous` has the file or the secret by which ranks meet. `queue` has the tasks of ranks that stay.
"""
