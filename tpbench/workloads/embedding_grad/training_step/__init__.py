"""The training step around the exchange, beside which transfers can run.

The modules, in the order of a first reading: `overlap` has a stand-in for both passes, `forward_index` the hashed index
of the forward pass, `other_parameters` their transfers, and `traffic_iteration` an iteration with all of them.
"""
