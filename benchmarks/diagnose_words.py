"""What docs/methods/causes.md says beside the tables that benchmarks/diagnose.py makes."""

INTRODUCTION = (
    "# How causes are told apart",
    "",
    "<!-- Written by benchmarks/diagnose.py; run it again after a change of a test. -->",
    "",
    "`mismatchctl diagnose` looks at the rows of a dump as they are, masked tokens too, and tests one cause after the",
    "other; what a cause explains is taken out before the next test, and what is left is held against the noise that",
    "float32 and bfloat16 make: beyond it, the rest is a finding of its own, `unexplained`. The shares of the K3 that",
    "findings explain add up, with what is unexplained and what is noise, to 100 %. Counts and the levels by step and",
    "worker are of all tokens; everything else is read from a sample of whole rows, chosen by a hash of their content:",
    "a 32nd of the dump, at least 65,536 tokens and at most 262,144.",
    "",
)

CONFIDENCE = (
    "Two identities decide what no threshold could: if the rollout column is the distribution that sampled, and the",
    "trainer's has at least its support, E[ratio] = 1; if the trainer's column is what sampled, E[1 / ratio] = 1.",
    "",
    "## What confidence means",
    "",
    "`high`: of such findings, 95 in 100 are meant to be true on dumps that nobody tuned to; `medium`: 70 "
    "in 100; `low`:",
    "a possibility, one line. Counter-evidence caps it: a rival that fits as well, lags without effect, too "
    "few rows. It",
    "was measured by training small models (`benchmarks/strangers.py`), sampling from them with an engine that decodes",
    "in bfloat16 with a cache, scoring the same tokens truly with one prefill, and planting one cause in each dump",
    "(`benchmarks/stranger_dumps.py`). The models below were trained for this measure alone, and no rule was changed",
    "after a look at them.",
    "",
)

ESTIMATED = (
    "## How settings are estimated",
    "",
    "- A temperature (or what raw log-probs hide) is the exponent b in q = p^b / Z, whose Z is of each context and",
    "  unknown. What sampled from q has E[p / q] = 1 in every context, so that p / q - 1 is an instrument that no",
    "  function of the context moves: b = E[(p / q - 1) log q] / E[(p / q - 1) log p], whatever the contexts are. Its",
    "  interval holds every b that the scatter between clusters does not refute, and all that noise in the trainer's",
    "  column does to it: errors in log p draw the exponent away from 1, by twice the K3 of that noise at most, which",
    "  is counted as a spread of 0.05 in the logits. Experts that flip more than that are not in the interval.",
    "- If one b is right for all, ratios average to 1 among the contexts of each Z. A soft cap, penalties and other",
    "  weights do not leave it so: that, not only how unlikely tokens scale, tells a temperature from them.",
    "- k is E[1 / q]: sampled from q, 1 / q averages to the number of tokens that have any probability, in every",
    "  context. Places count by the mass that was cut off. Where fewer tokens are kept the less is cut, it is top-p;",
    "  where more are, min-p.",
    "- p is where the log-probs of tokens that were alone in their nucleus end; without such, it lies between the mass",
    "  that was kept and the same without the sampled token.",
    "- Shares of rows have Wilson's interval, for the rows of the dump are some of those that were written; an onset",
    "  has that of the fit of the growth. Of rows that hold each other's log-probs only those are counted whose other",
    "  row is in the sample: their interval reaches up to the share of all rows that disagree throughout.",
    "- A lag is what the version columns say: nothing is estimated, so it has no interval.",
    "- min-p has no estimate, and so no interval, without recorded lists of both sides' likeliest tokens: it is",
    "  relative to the likeliest token's probability, which columns of sampled tokens do not hold. Nor has k where",
    "  less than a tenth of the mass is cut, nor a temperature beside a truncation. The finding says so.",
    "",
)
"""Why estimates are what they are."""

BEFORE = (
    "Models that were strangers once showed what the next may do before a rule followed it: one that hardly attends to",
    "its context had 75 % true at high and 54 % at medium; one that is sure of itself, with experts that flip, 36 % at",
    "medium, and alarms in up to 38 % of its clean dumps; greedy samples were called another vocabulary; noise of 1.14",
    "times the bound a quantized cache. Another stranger may do worse in its own way.",
    "",
)
"""What a rerun cannot tell."""

LIMITS = (
    "## Limits",
    "",
    "- int8 weights over bfloat16 leave a trace too small to tell from bfloat16's own: noise, which says so.",
    "- The noise that bfloat16 makes (0.022 of the logits, at most) was measured on small models, and no dump "
    "tells how",
    "  large its model is. Up to three times as much, balanced, is `unexplained` at low confidence; with a "
    "tail as experts",
    "  make it, it is noise at medium; without one, `cache_quantization` at medium from 3,000 tokens on, with "
    "its rivals,",
    "  where it is 1.25 times as much or grows along the response. So a few wrong tokens in a dump that is as loud,",
    "  scattered and not all on last tokens, are low at most.",
    "- Weights that differ can be off more in the first tokens than in later ones, to 1.4 times; a lost prompt "
    "made 2.1 at",
    "  the least. Below 1.7 `context_mismatch` is low at most.",
    "- Older, quantized, adapted and other weights look alike (`weights_differ`) without versions or "
    "current log-probs;",
    "  so do positions that are off under ALiBi, at every place alike: below 15 % of the variance tied to tokens",
    "  `weights_differ` is medium at most, and low below 1.25 times bfloat16's noise, which rounds weights too.",
    "- Dropout, noise of a router and other numerics that grow no structure are `unexplained` or, near fp8's level,",
    "  `cache_quantization` at medium confidence: score a batch twice.",
    "- With 8 rows most causes that act on all tokens show only as `unexplained`.",
    "- Whatever acts on every token (temperature, truncation) hides small mismatches under it. Fix it, and "
    "diagnose again.",
    "- Log-probs that were sampled from a truncated or tempered distribution but recorded raw, with a trainer at",
    "  temperature 1, agree: nothing in these columns shows it.",
    "- A prefix cache kept over a weight update is told by prompts that differ from each other at the start of",
    "  their responses alone: it takes ids of prompts with several responses each, and prompts that one side",
    "  truncates look the same. Without them it is noise, or `context_mismatch`.",
    "- Text tokenized anew into as many tokens as before agrees again without a shift: it is",
    "  `edited_response`, or nothing.",
    "- Two wrong columns at once (shifted and in another base) are told as one, or not at all.",
    "",
)
