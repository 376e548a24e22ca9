// Asks the search of the site in site/, by the script that its pages run, and prints the addresses that it finds.
// node packaging/search_worker.js SITE QUERY...   → a line of JSON for each query: the best result of each page found
"use strict";
const fs = require("fs");
const vm = require("vm");

const SETUP = 0, QUERY = 2, RESULT = 3; // the kinds of messages of the theme's worker

const [site, ...queries] = process.argv.slice(2);
const folder = `${site}/assets/javascripts/workers`;
const script = fs.readdirSync(folder).find((name) => /^search\..*\.min\.js$/.test(name));
const listeners = [];
const answers = [];
const page = {
  console,
  addEventListener: (_, listener) => listeners.push(listener),
  postMessage: (message) => answers.push(message),
  importScripts: () => {},
  location: { href: "http://localhost/" },
};
page.self = page;
vm.createContext(page);
vm.runInContext(fs.readFileSync(`${folder}/${script}`, "utf8"), page);

async function send(type, data) {
  for (const listener of listeners) await listener({ data: { type, data } });
}

async function main() {
  const index = JSON.parse(fs.readFileSync(`${site}/search/search_index.json`, "utf8"));
  await send(SETUP, { ...index, options: { suggest: true } });
  for (const query of queries) {
    answers.length = 0;
    await send(QUERY, query);
    const found = answers.find((message) => message.type === RESULT);
    console.log(JSON.stringify(found.data.items.map((sections) => sections[0].location)));
  }
}

main();
