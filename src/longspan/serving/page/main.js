import { tabs } from "./tabs.js";
import { training } from "./training.js";
import { writing } from "./write.js";

const watched = training();
tabs((name) => watched.show(name === "training"));
writing();
