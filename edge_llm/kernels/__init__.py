"""The only home of numba and llvmlite: functions over arrays, scalars and addresses, compiled ahead of use.

`layout` holds the numbers that the host and the kernels agree on and imports neither; the host reaches compiled code
only through the addresses that `warmup.load_kernels` gives.
"""
