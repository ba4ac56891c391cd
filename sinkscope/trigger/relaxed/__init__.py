"""Section 7 of Lampert et al. 2605.08453 as an experiment: what a block costs whose attention is a sink or a diagonal.

Of the paper: the tokens, the pairwise requirements on scores, the four bounds, and that the cost is the sum of squared
Frobenius norms of the block's matrices. Ours, since the paper's full text was not read:

- the nuisance of a group are the corners of a simplex in r_eta dimensions, alike in all groups;
- every key but the right one is a wrong one, BOS and copy tokens among them; BOS's own row asks for nothing;
- what the block writes: to a dormant token its own token once more (a token-wise map of rank r_eta + C, which the
  diagonal's values or the sink's MLP can do), to a copy token its group's lambda dbar_c, to BOS nothing;
- values and MLP see the pattern as exact: mass 1 on the right key, even over a copy token's group;
- the block: h = x + W_O W_V (A x), y = h + W_2 relu(W_1 h), all matrices free, no norm.
"""
