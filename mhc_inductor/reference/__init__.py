# SPDX-License-Identifier: Apache-2.0
"""The ops in plain PyTorch: the specification, and what runs where no kernel does.

Each function has the name, the arguments and the results of its op. Read a module with its source next to it:

- :mod:`.mhc`: coefficients, Sinkhorn, mixing, head. arXiv 2512.24880, equations 3 and 14 to 19
- :mod:`.fused`: a mixing and the coefficients after it. The same equations
- :mod:`.single_pass`: streams collapsed with the weights of the sublayer before. The same, in the order of DeepSeek-V4.1
- :mod:`.e79`: the coupled recurrence of two states. The E79 model's recurrence
- :mod:`.selection`: attention over ranges of keys. arXiv 2502.11089, section 3.3.2
- :mod:`.selection_lists`, :mod:`.selection_entries`: over lists of keys; with a bias for each entry. arXiv 2512.02556
- :mod:`.selection_masks`: under a mask. arXiv 1706.03762, equation 1
- :mod:`.selection_blocks`: the blocks that queries select. arXiv 2502.11089, equations 8 to 10
- :mod:`.index`: scores of an indexer, and the keys that they choose. arXiv 2512.02556, equation 1
- :mod:`.index_loss`: the loss that trains an indexer. arXiv 2512.02556, the loss of the sparse training stage

In all of them the arithmetic is fp32, or fp64 for fp64 (:mod:`.precision`). A backward is a closed form, which tests compare with
fp64 autograd of the forward. Large intermediates are computed for a chunk of queries at a time.
"""
