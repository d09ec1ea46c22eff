// Search results: pages that answer before the API, and both before tables and the changelog.
const PARTS = {start: 30, how_to: 30, reference: 25, understand: 20, api: 0, notebooks: 0};
PARTS["reference/errors"] = PARTS["reference/terms"] = 35;

var Scorer = {
  score: ([docname, title, anchor, descr, score]) =>
    score + (PARTS[docname] ?? PARTS[docname.split("/")[0]] ?? (docname.includes("/") ? -30 : -60)),
  objNameMatch: 60,  // the exact name of a function is what was meant
  objPartialMatch: 6,
  objPrio: {0: 15, 1: 5, 2: -5},
  objPrioDefault: 0,
  title: 40,
  partialTitle: 20,
  term: 5,
  partialTerm: 2,
};
