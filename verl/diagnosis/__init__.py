"""Known problems of training, recognized in the metrics of a run: each rule has a name, evidence, meaning and remedy.

`rules.RULES` lists all rules, which are in one module per topic. A rule is a function of the `History` of a run that
returns the evidence of its problem, or None; `diagnosis.Diagnosis` applies all rules to a run that goes on, and
`diagnosis.diagnose` to one that has ended. Nothing here knows where the metrics come from.
"""
