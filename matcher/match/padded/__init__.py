"""The network on a GPU: pairs padded to tables of one size, all decisions made on the device, one read.

On a CPU points that are dropped leave the packed list, and a pair that is confident ends the run at once
(`matcher.match.network`). On a GPU the program would wait for each such decision. Here nothing changes its
size: points that are dropped are masked, a pair that has stopped keeps its state while the others go on, and
only the finished matches are read. The results are those of the packed run to rounding.
"""
