"""The evaluation of the MoEless paper as commands: ``moeless reproduce fig07 --out results/``.

Uses ``moeless`` as any other program would; ``moeless`` does not know this package. Read in this
order: ``figure`` (what an experiment is and gives), ``context`` (what it is given), ``registry``
(which there are), ``writing`` and ``manifest`` (what becomes of it), ``command``, one of
``figures``.
"""
