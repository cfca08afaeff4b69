"""How ranks exchange tensors: devices, transports, messages, channels, and the networks that provide them.

A channel carries messages between two stages over one of three networks: gloo between processes, NCCL between GPUs,
memory within one process. Processes of one machine sum gradients through shared memory. `stage` and everything above
it may import this; it imports none of them.
"""
