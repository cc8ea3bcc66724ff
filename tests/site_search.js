// node site_search.js SITE QUERY…: for each query a line of JSON, the hits of the site's own search
// worker: page by page, the best headings of each page first, as the site shows them.
const fs = require("fs"), path = require("path"), vm = require("vm");
const [site, ...queries] = process.argv.slice(2);
const folder = path.join(site, "assets/javascripts/workers");
const worker = fs.readdirSync(folder).find((name) => name.endsWith(".js"));
let listen, answered;
const self = { addEventListener: (_, f) => (listen = f), postMessage: (x) => answered(x), console };
vm.createContext(Object.assign(self, { self }));
vm.runInContext(fs.readFileSync(path.join(folder, worker), "utf8"), self);
const index = JSON.parse(fs.readFileSync(path.join(site, "search/search_index.json"), "utf8"));
const ask = (data) => new Promise((resolve) => { answered = resolve; listen({ data }); });
(async () => {
  await ask({ type: 0, data: { ...index, options: { suggest: false } } });
  for (const query of queries) {
    const { data } = await ask({ type: 2, data: query });
    console.log(JSON.stringify(data.items.map((page) => page.map((x) => x.location))));
  }
})();
