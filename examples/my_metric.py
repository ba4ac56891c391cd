"""Two metrics of your own, measured together with sinkscope's. From the command line:

    sinkscope scan example:gemma-3-270m --metrics my_metric.py --out runs/gemma
    sinkscope plot runs/gemma --figure heatmap --metric local_mass -o local.png
    sinkscope export runs/gemma --metric local_mass --metric first_peak

and from Python: sinkscope.scan("example:gemma-3-270m", metrics=[local_mass, first_peak]).

A metric is one function. It reads a LayerView, one attention layer's numbers for a batch of sequences, and returns one
number for each sequence and head (head_metric) or for each sequence (layer_metric). sinkscope takes means and standard
errors over the sequences. The function's name is the column's name; the first paragraph of its docstring is the
definition that the manifest keeps. It needs no attention map: what a LayerView holds grows with T, not with T x T.
"""

from sinkscope import LayerView, Missing, head_metric, layer_metric


@head_metric(unit="probability", range="[0, 1]")
def local_mass(view: LayerView):
    """Mean over queries i >= 1 of A[i,i] + A[i,i-1]: what a head gives to the token itself and to the one before it."""
    diagonal, previous = view.attention.diagonal, view.attention.previous  # [sequence, head, query]
    if diagonal is None or previous is None:  # cross-attention: queries are no keys
        raise Missing
    return (diagonal + previous)[..., 1:].mean(-1)  # [sequence, head]


@layer_metric(unit="share", range="[0, 1]", source="ours, after Sun et al. 2402.17762")
def first_peak(view: LayerView):
    """Largest |element| of x_0 over the norm of x_0: 1 = the first token's vector is one channel alone."""
    return view.x_peaks[:, 0] / view.x_norms[:, 0]  # [sequence]; both raise Missing where the block is not seen
