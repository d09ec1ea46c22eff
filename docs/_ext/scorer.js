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
};

// What a word is worth on a page, where it is found whole, or else as a part of a word.
const WEIGHTS = {title: 45, searchWords: 40, heading: 30, text: 10, absent: -25};
const PART = 0.3;

// Names are searched by their words, too: MixedPrecision, grad_scaler.
const splitWords = splitQuery;
splitQuery = (text) =>
  splitWords(text).flatMap((word) => [word, ...word.split(/_|(?<=[a-z])(?=[A-Z])/)]);

// Pages by the mean weight of the words of a query, rare words counting more; no page needs all.
Search.performTermsSearch = (words) => {
  const {terms, titleterms, titles, docnames, filenames, indexentries} = Search._index;
  const stemmer = new Stemmer();
  const stems = (text) => splitQuery(text.toLowerCase()).map((word) => stemmer.stemWord(word));
  const phrases = [];  // of docs/_ext/search_words.py: the page, and the stems of a phrase
  for (const [entry, places] of Object.entries(indexentries))
    for (const [page, , isMain] of places) if (isMain) phrases.push([page, stems(entry)]);

  const scores = docnames.map(() => 0);
  const hits = docnames.map(() => false);
  let total = 0;
  for (const word of words) {
    const weights = new Map();
    const raise = (page, weight) => weights.set(page, Math.max(weight, weights.get(page) ?? 0));
    const look = (matches, factor) => {
      for (const [index, weight] of [[terms, WEIGHTS.text], [titleterms, WEIGHTS.heading]])
        for (const key of Object.keys(index).filter(matches))
          [index[key]].flat().forEach((page) => raise(page, weight * factor));
      const wholes = [...titles.map((title, page) => [page, stems(title), WEIGHTS.title]),
        ...phrases.map(([page, phrase]) => [page, phrase, WEIGHTS.searchWords])];
      for (const [page, found, weight] of wholes)
        if (found.some(matches)) raise(page, weight * factor);
    };
    look((key) => key === word, 1);
    if (!weights.size && word.length > 2) look((key) => key.includes(word), PART);
    if (!weights.size) continue;  // no page has the word
    const rarity = Math.log(1 + docnames.length / weights.size);
    total += rarity;
    docnames.forEach((_, page) => (scores[page] += rarity * (weights.get(page) ?? WEIGHTS.absent)));
    weights.forEach((_, page) => (hits[page] = true));
  }
  for (const [page, phrase] of phrases)  // all words of a phrase, in another order
    if (words.size > 1 && [...words].every((word) => phrase.includes(word)))
      scores[page] = total * 90;
  const least = Math.max(...scores) - 90 * total;
  return docnames.flatMap((name, page) =>
    hits[page] && scores[page] > least
      ? [[name, titles[page], "", null, scores[page] / total, filenames[page], "text"]]
      : []);
};
