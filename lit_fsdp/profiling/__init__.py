"""What a step takes, measured on this rank: memory, communication, time, FLOPs, anomalies.

Import from the files: from here, each would load the parts of torch that the others need.

- ``clock``: ``Clock``, ``Timeline``; device time without waiting for the device
- ``flops``: ``FlopCounter``, ``WorkCounter``
- ``memory``: ``measure_states``; ``memory_trace``: ``MemoryTrace``, which writes the ``MemoryLog`` of ``memory_log``
- ``device_memory``: what the device says
- ``communication_meter``: ``CommunicationMeter``; ``expected_communication``: the same from the plan alone
- ``replaced_calls``: what stands between FSDP2 and what it calls while it is measured
- ``collectives``: ``measure_fabric``; time and bandwidth of each collective by size
- ``anomalies``: ``SpikeDetector``, ``UnitWatch``; steps with NaN or spikes
"""
