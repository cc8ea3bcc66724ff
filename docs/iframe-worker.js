// Search without a server: a page that is opened as a file may not start a worker.
if (location.protocol === "file:")
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      this.ready = new Promise((resolve) => (this.frame.onload = resolve)).then(() => {
        const { contentWindow, contentDocument } = this.frame
        contentWindow.postMessage = (data) => this.#tell(this, data)
        const script = contentDocument.body.appendChild(contentDocument.createElement("script"))
        return new Promise((resolve) => Object.assign(script, { src: url, onload: resolve }))
      })
      document.body.append(this.frame)
    }
    #tell(target, data) {
      target.dispatchEvent(new MessageEvent("message", { data }))
    }
    postMessage(data) {
      this.ready.then(() => this.#tell(this.frame.contentWindow, data))
    }
  }
