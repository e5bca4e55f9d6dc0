// The dialog of an undo operation: its plan, what to do about conflicts, and applying it.
import { button, counted, fill, h, spinner, failure } from "./dom.js";
import { post } from "./api.js";
import { OUTCOMES, reasonText } from "./words.js";
import { fileDiff } from "./diff.js";

const ORDER = ["conflicted", "failed", "merged", "restored", "skipped"];

export class PlanDialog extends HTMLElement {
  connectedCallback() {
    if (this.dialog) return;
    this.title_ = h("h2", { id: "plan-title" });
    this.body = h("div.plan-body");
    this.bar = h("footer");
    this.dialog = h("dialog.plan", { "aria-labelledby": "plan-title", oncancel: () => this.end(null), onclose: () => this.end(null) }, h("header", this.title_, button("Close", () => this.dialog.close(), { kind: "quiet" })), this.body, this.bar);
    this.append(this.dialog);
  }

  // `act`: {title, verb, path, body?}. Resolves with the result, or null if nothing was done.
  open(act) {
    this.act = act;
    this.onConflict = "merge";
    this.changed = false;
    this.returnTo = document.activeElement;
    fill(this.title_, act.title);
    fill(this.bar);
    this.dialog.showModal();
    return new Promise((resolve) => {
      this.resolve = resolve;
      this.replan();
    });
  }

  end(result) {
    const resolve = this.resolve;
    this.resolve = null;
    if (this.dialog.open) this.dialog.close();
    fill(this.body);
    if (resolve) {
      resolve(result);
      this.returnTo?.isConnected && this.returnTo.focus({ preventScroll: true });
    }
  }

  async replan() {
    fill(this.body, spinner("Making the plan …"));
    try {
      const plan = await post(this.act.path, { dry_run: true, on_conflict: this.onConflict }, this.act.body);
      this.show(plan);
    } catch (error) {
      fill(this.body, failure(error));
      fill(this.bar, button("Close", () => this.dialog.close()));
    }
  }

  show(plan) {
    this.plan = plan;
    const diffs = new Map(plan.diffs.map((diff) => [diff.path, diff]));
    const isFolder = (one) => Number(diffs.get(one.path)?.state === "dir");
    this.opens = plan.outcomes.filter((one) => !isFolder(one)).length <= 3;
    const outcomes = [...plan.outcomes].sort((a, b) => ORDER.indexOf(a.outcome) - ORDER.indexOf(b.outcome) || isFolder(a) - isFolder(b));
    const moving = plan.outcomes.filter((one) => one.outcome === "restored" || one.outcome === "merged").length;
    const conflicts = plan.outcomes.filter((one) => one.outcome === "conflicted").length;
    fill(
      this.body,
      this.changed ? h("p.banner", { role: "alert" }, "The files changed meanwhile. Nothing was applied. This is the new plan.") : null,
      plan.outcomes.length ? null : h("p.note", "There is nothing to change."),
      plan.overwrote_external.length ? h("p.banner", `This replaces edits of others in ${plan.overwrote_external.join(", ")}. Their bytes are stored first.`) : null,
      h("ul.outcomes", outcomes.slice(0, 200).map((one) => this.outcome(one, diffs.get(one.path)))),
      outcomes.length > 200 ? h("p.note", `and ${counted(outcomes.length - 200, "more path")}`) : null,
      plan.talk ? h("p.note", `The transcript goes from ${counted(plan.talk.messages_before, "message")} to ${plan.talk.messages}.`) : null,
      (plan.coverage || []).length ? h("p.note", `Not captured, so it stays as it is: ${plan.coverage.slice(0, 5).map((gap) => gap.path).join(", ")}.`) : null,
    );
    const choice = h(
      "label.choice",
      "If others edited the same lines: ",
      h("select", { onchange: (event) => { this.onConflict = event.target.value; this.replan(); } }, [["merge", "leave those files"], ["overwrite", "overwrite (their bytes are stored)"], ["refuse", "do nothing at all"]].map(([value, words]) => h("option", { value, selected: value === this.onConflict }, words))),
    );
    const isEmpty = !moving && !plan.talk && !(plan.ok && plan.outcomes.length);
    const words = isEmpty ? `Nothing to ${this.act.verb.toLowerCase()}` : `${this.act.verb} ${moving ? counted(moving, "path") : ""}`.trim();
    const apply = button(words, () => this.apply(), { kind: "primary", disabled: isEmpty });
    fill(this.bar, conflicts || this.onConflict !== "merge" ? choice : h("span.choice"), button("Cancel", () => this.dialog.close()), apply);
    (isEmpty ? this.bar.querySelector("select, button") : apply).focus();
  }

  outcome(one, diff) {
    const words = [h(`span.chip.${one.outcome}`, one.outcome), h("span.path", one.path), h("span.why", one.reason ? reasonText(one.reason) : OUTCOMES[one.outcome])];
    if (!diff || diff.state === "dir") return h("li", h("div.line", words));
    const stays = ["conflicted", "skipped"].includes(one.outcome) ? h("p.note", "Overwriting would do this:") : null;
    const details = h("details", { open: this.opens }, h("summary", words), stays, fileDiff(diff));
    return h("li", details);
  }

  async apply() {
    fill(this.bar, spinner("Applying …"));
    try {
      const result = await post(this.act.path, { on_conflict: this.onConflict }, this.act.body, { "if-match": `"${this.plan.digest}"` });
      this.end(result);
    } catch (error) {
      if (error.status === 412) {
        this.changed = true;
        this.show(error.body.plan);
        return;
      }
      fill(this.bar, failure(error), button("Try again", () => this.replan()));
    }
  }
}

customElements.define("m-plan", PlanDialog);
